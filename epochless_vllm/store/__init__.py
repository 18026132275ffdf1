"""Immutable, content-addressed adapter revisions on disk, and the inspector that admits them."""
