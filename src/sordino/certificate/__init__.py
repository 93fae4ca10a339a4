"""The certificate of a run: built from plan and charges, checked, signed, and explained in plain sentences."""
