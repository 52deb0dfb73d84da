"""Descriptions of families: conversion of configs to specs and of tensors to slots, and back."""
