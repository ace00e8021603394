"""What a configuration will need before it runs: memory, speed and cost."""
