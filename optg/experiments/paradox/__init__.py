"""The independence paradox, measured: what a criterion says the loss will do, and what it does.

A first-order criterion says what removing one weight does to the loss while all others stay (Eq. 4 and 7 of the paper). It is
used to remove many at once, where the others go too and the rest is trained on (Eq. 8).
"""
