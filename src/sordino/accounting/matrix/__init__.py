"""Matrix mechanisms: noise C^-1 Z that is correlated over rounds, its sensitivity, and strategies C that are optimised.

A run releases C X + Z, row by row, where row t of X is the sum of round t's messages; all that is made of it, the
models too, is post-processing. As X + C^-1 Z it is each round's sum with noise that later rounds take back. What one
client can move is  ||sum_{t in its rounds} C[:, t] u_t||,  ||u_t|| <= 1: the sensitivity, over all patterns of rounds
that the sampler allows (`patterns`). C is lower triangular and, but for the tree, Toeplitz (`toeplitz`).

Plain arrays: no part of a plan and no accounting here.
"""
