"""What `sweep plan` answers, worked out from values alone: nothing here reads, prints or runs."""
