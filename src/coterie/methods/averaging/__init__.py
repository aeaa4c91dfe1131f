"""Averaging: one model for all users, with fine-tuning, own examples that count more, and averages of means."""
