"""The shipped settings, importable as `pcgsvc.conf` once the package is installed.

YAML here only picks values; what a setting means, its unit and its default stand in
`pcgsvc/config.py`.
"""
