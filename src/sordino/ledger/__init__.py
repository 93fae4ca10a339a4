"""Ledgers of data sets: charges over all runs, budgets of clients, and the data-use policy of a silo."""
