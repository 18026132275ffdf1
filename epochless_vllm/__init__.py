"""Epochless: every token says, and can prove, which policy wrote it.

The package root imports nothing, so that the verifier can be used where only a Python interpreter is.
"""

__version__ = "0.1.0"
