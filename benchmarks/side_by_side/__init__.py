"""The package of another commit and this tree side by side: the same operations, and every answer compared.

    python -m benchmarks.side_by_side --against COMMIT --operations 1000000

Each package plays the same *lives* in a process of its own: a life is one space from its first operation to its last,
drawn from a seed (``lives``), operation by operation (``operations``, ``misuse``), through public methods alone
(``player``). After each operation the process writes the call, its result, and the visible state of the space
(``observing``); the command compares the two streams (``comparing``) and stops at the first difference. What is drawn
next depends on earlier answers, which are the same as long as nothing differs.
"""
