"""Measure the independence paradox: compare what a pruning criterion predicts for the loss with what happens.

A first-order criterion predicts what removing one weight does to the loss while all others stay (Eq. 4 and 7 of the paper). But
it is used to remove many weights at once, after which the remaining ones are trained further (Eq. 8).
"""
