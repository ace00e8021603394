"""The real QLoRA training that a trial is: model, adapters, data, step and meter. Runs in the
worker only.
"""
