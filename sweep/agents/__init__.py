"""What an agent asks and does: commands as typed tools, and those that go on by themselves."""
