"""Runs on disk: the folder of a run, and the code that starts and resumes it."""
