"""Importers: one file for each format. Content in, tables out."""
