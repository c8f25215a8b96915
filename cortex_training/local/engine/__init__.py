"""The part that computes: models, gradients, steps, checkpoints' contents and samples, on transformers and PEFT.

Nothing outside this package imports torch, and this package is imported when the first job initialises, so that a
service which trains nothing starts at once. Objects here belong to one sub-job and are used by its worker thread alone.
"""
