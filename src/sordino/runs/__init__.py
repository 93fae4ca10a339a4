"""A run on disk: its folder, and how it is started and continued."""
