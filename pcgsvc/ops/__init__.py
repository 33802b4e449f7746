"""Splitting ops, the forward context, and attention behind them."""
