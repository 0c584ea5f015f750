"""Explanations as pictures. Only these modules need matplotlib."""
