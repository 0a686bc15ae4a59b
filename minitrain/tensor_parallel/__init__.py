"""The matrices of a layer over ranks.

Page   first               the technique on 80 lines of plain torch
First  linear              columns, then rows, one sum
       vocabulary          the table and the loss
       model               a whole model: attention by heads, the MLP by hidden units
then   sequence            between the matrices the sequence is cut
       overlap, ring_overlap                    what is sent behind what is computed
       low_precision       products in few bits, whose scales agree
"""
