"""Structural policy simulator."""
