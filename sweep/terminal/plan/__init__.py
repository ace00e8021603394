"""What `sweep plan` prints, and the way from its options there."""
