"""Policies: trained models that draw samples and replay single decisions with gradients."""
