"""The ``epochless`` command: one module per verb, imported when its verb is used."""
