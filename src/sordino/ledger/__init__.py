"""The ledger of a data set, and everything else that outlives one run: charges, budgets, the policy of a silo."""
