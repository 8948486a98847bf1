"""Pictures drawn by matplotlib over the numbers of `relpos.maps`."""
