"""The proof behind `verify --resume`: a run stopped and resumed ends as one that was not."""
