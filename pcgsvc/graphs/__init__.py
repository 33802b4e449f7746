"""Capture: program -> replay steps. In this process only; nothing here touches the disk."""
