"""Tests of the C extension: its memory layout in C, its Python interface, and how it is built."""
