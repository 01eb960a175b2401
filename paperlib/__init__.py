"""Ensemble-based Dirichlet modelling: estimation, calibration, selective classification, and the paper's runs."""
