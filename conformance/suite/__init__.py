"""The judge as pytest items: `pytest --pyargs conformance.suite --runner NAME`."""
