"""What `sweep plan` answers: a question is resolved, then answered from values alone."""
