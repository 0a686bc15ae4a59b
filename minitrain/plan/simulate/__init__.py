"""What a run would take on a described machine, computed from its events. No torch.

First  machines            devices and links, from datasheets
       collectives         what a collective costs
       replay              when everything would happen; transfers that meet on a link or a card share it
then   timeline            where the time went, and a file for a browser
beside links               work, and copies that share links
"""
