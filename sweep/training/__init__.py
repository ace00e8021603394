"""The real QLoRA training that a trial is: model, adapters, data, step, meter. Worker only."""
