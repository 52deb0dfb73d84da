"""Hugging Face checkpoints: conversion of configs and tensors to specs and modules, and back."""
