"""Privacy accounting: computes epsilon from privacy events. Called by `Plan.cost` and the calculator; has no tensors.

`events` describes releases, `pld` and `renyi` compose privacy losses, `matrix` optimises correlated noise,
`composition` computes the cost of a run for each adversary, `calibration` solves for a target epsilon.
"""
