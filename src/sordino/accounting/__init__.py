"""Privacy accounting: from events to epsilon. `Plan.cost` and the calculator call it; it uses no tensors.

`events` states what was released, `pld` and `renyi` compose privacy losses, `matrix` bounds correlated noise,
`composition` adds up a run per adversary, `calibration` solves for a target epsilon.
"""
