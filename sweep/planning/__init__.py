"""What `sweep plan` answers: the question settled, then the answer worked out from values alone."""
