"""How much there is to read: figures of the source itself, measured as the text is and as it executes.

python -m benchmarks.reading           what some jobs execute, and lengths, beside bars and another commit
python -m benchmarks.reading.pairs     which core files and features name each other, sizes of rooms, circles
python -m benchmarks.reading.drawn     twenty lines drawn from the source, whose files a reader is to guess
"""
