"""Trainer-side client."""
