"""The version of the Python package, the wheel and the jar."""

__version__ = "0.1.0"
