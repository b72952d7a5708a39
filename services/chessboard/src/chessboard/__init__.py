"""Property objects and who holds them: the grid that sales people look at, and the truth of what is free."""
