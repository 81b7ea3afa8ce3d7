"""Devices, processes and signals."""
