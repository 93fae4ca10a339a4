"""Accounting: everything from an event to its epsilon. `Plan.cost` and the calculator call it; no tensors here.

`events` states what was released, `pld` and `renyi` compose privacy losses, `matrix` bounds correlated noise,
`composition` adds up a run per adversary, `calibration` solves for a target epsilon.
"""
