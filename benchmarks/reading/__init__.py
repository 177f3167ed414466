"""How much there is to read: what a few jobs execute, files of the package, and lines of code.

python -m benchmarks.reading           now, in another commit, and the bars
"""
