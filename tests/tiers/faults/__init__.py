"""Faults of tiers: machines that cause them at random, and judge what becomes of each.

``python -m tests.tiers.faults --faults 1000000 --seed 0`` runs all of them, and fails at the first breach:

- ``machine``: a store core over a simulated disk (``disk``), with a model of every byte (``judge``). So many faults.
- ``real_media``: stores on threads over a folder and over Redis. A hundredth as many on each.
- ``kills``: processes with stores, killed at any moment. A thousandth as many.

``ledger`` counts how often each fault happened and what became of it. ``contents`` are the entries, and the frames that
must be refused in their place.
"""
