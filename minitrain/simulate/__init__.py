"""What a run would take on a described machine, computed from its events. No torch.

First  events              what one rank did, in order
       machines            devices and links, from datasheets
       collectives         what a collective costs
       replay              when everything would happen
then   timeline, intervals, trace               where the time went, and a file for a browser
beside storage             feeding accelerators from slow disks
"""
