"""Trains router heads and calibrates thresholds for a pair of models: `trouterd train` and `trouterd calibrate`."""
