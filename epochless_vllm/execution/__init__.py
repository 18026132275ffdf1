"""Linear layers over rows of different revisions in one batch, on CPU.

A step's rows are grouped by slot once (``rows``), each layer keeps its resident adapters at their true rank
(``slots``), and one call per layer adds to every row the delta of its own adapter (``linear``, ``kernel``). A row's
delta depends on that row and its own adapter alone, bit for bit, whatever shares the batch. Knows no engine, no
request and no revision: a slot is a small integer.
"""
