"""What is drawn and shown of runs."""
