"""`relpos check`: whether the positions of a model are right. Not called `check`, which is the function's name."""
