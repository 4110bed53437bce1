"""The one version of package, wheel and jar."""

__version__ = "0.1.0"
