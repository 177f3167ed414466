"""Programs for whoever works on the project; none of them is installed with it."""
