"""The epochless command."""
